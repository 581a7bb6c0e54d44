"""Draws a plan: charts as a PNG, and a page with charts, tables and layouts."""
