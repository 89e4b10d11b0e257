"""Who promoted this tensor: runs a model under the plan's autocast and names the line that left the number format."""
