"""Generated from ``protos/baton/api/v1`` by ``make protos``; do not edit."""
