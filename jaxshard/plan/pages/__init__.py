"""A plan drawn: charts and a page."""
