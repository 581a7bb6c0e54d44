"""A plan drawn: its charts as a PNG, and a page with charts, tables and layouts."""
