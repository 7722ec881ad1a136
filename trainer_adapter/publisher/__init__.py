"""The weight publisher: tensors of a trainer become a version that all workers hold."""
