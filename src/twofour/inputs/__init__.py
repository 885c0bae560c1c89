"""What a model takes: names, types and sizes of its inputs, and arrays that fit them."""
