"""Images of rows: references, placeholders in the text, inputs of the model. Only runs with images import it."""
