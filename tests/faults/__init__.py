"""One test for each fault that real systems of this kind had; `index` says which shows what."""
