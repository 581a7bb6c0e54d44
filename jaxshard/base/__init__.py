"""What everything stands on: trees and their paths, axes, traced programs, units, types. Imports nothing of ours."""
