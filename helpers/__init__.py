"""What the notebooks share and what would distract in them. The ideas themselves are code in the notebooks."""
