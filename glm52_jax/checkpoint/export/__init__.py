"""Writing the published layout: from any checkpoint, or from a parameter tree."""
