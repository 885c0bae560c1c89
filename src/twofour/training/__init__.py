"""Masks held in training: the zeros of a pruned module stay zeros while an optimizer trains it."""
