"""What processes say to each other, and under which names they find each other."""
