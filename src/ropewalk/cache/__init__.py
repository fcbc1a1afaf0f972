"""Keys and values of earlier tokens: `KVCache`, the forms in which it keeps them, and moves to other positions."""
