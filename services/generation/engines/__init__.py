"""Generation engines; `shared/registry.py` holds the table of their names."""
