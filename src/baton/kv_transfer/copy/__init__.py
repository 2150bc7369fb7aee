"""Moving and converting bytes: copies between mappings, over sockets, between dtypes."""
