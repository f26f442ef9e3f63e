"""The asset graph. Groups, in the order data flows: corpus, valuation, provenance, training, unlearning."""

ASSETS = (
    "deliveries", "corpus", "quarantine", "clusters", "tokens", "target",
    "commitment", "evaluation_plan", "entropy", "quality", "influence", "value_judgement", "owner_values", "values", "prices",
    "training_plan", "checkpoint", "evaluation", "receipts",
    "erasure_request", "gold_checkpoint", "unlearned_checkpoint", "robustness_audit", "report", "shredding",
)  # fmt: skip
"""Every asset key; a test compares it with the graph."""
