"""Foundations: trees and their paths, mesh axes, types, and where equations come from. It imports `system` alone."""
