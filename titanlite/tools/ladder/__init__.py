"""`titanlite ladder`: the loss of a model, predicted from runs of smaller sizes."""
