"""What a rope is, as plain numbers, and the axes of its pairs."""
