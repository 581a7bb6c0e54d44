"""Foundations: trees and their paths, mesh axes, and types. It imports no other part of jaxshard."""
