"""Operations whose splits need code of their own on the blocks."""
