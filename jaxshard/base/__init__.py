"""Foundations: trees and their paths, mesh axes, traced programs, units, types. Imports no other part of jaxshard."""
