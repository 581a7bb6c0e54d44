"""Where each leaf of params, gradients and state lives: pure functions of shapes, dtypes, options and mesh."""
