"""The built-in environments, one module each. Named in the environments table of `shared/registry.py`."""
