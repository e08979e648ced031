"""What a step takes beside its arrays: workspaces, buffers, copies in other layouts, code."""
