"""Ground of all mechanisms: arguments, visibility, operands, products, meshes."""
