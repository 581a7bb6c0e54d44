"""The loss over a mesh: traces it, gathers its parameters where it needs them, and reduces its gradients."""
