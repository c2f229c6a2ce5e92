"""Operations that run on blocks by code of their own: lookups, slices, updates, ragged dots."""
