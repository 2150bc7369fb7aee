"""Tiers that other nodes share: Redis and object stores."""
