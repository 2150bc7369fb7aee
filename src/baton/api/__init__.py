"""Generated wire code, one package per API version."""
