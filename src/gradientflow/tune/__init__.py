"""Choosing a recipe: which plans could be best here, and which of them is."""
