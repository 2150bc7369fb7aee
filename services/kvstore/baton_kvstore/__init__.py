"""The kvstore service of Baton."""
