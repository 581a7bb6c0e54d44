"""Foundations: trees and their paths, mesh axes, traced programs, units, types, and how the command begins.

Imports no other part of jaxshard.
"""
