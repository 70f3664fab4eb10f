"""Score mechanisms: their shared call, and the engine that runs blocks of rows."""
