"""Makes `tests.toy` importable: other distributions install a package `tests` too, which would come first."""
