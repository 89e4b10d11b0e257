"""External trackers that ``logging.report_to`` names; one that fails is switched off, not the training.

In: a run's metrics.
Out: lines in TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio.
Imported by: name, from a table.
"""
