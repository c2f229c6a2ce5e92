"""Plans: made, kept, printed, explained, bound and run."""
