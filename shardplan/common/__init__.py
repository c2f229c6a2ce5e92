"""What every package uses and no reader of the pipeline needs: files, texts, progress."""
