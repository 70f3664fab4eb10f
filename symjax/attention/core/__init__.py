"""Code that all mechanisms share: arguments, visibility, operands, products, meshes."""
