"""The real core under every interleaving within bounds, and cores with one guard removed, which must be caught."""
