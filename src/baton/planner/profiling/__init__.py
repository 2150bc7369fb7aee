"""Where profiles come from: measured engines, links and deployments, or published figures."""
