"""The loss over a mesh: it is traced, its parameters are gathered where it needs them, its gradients reduced."""
