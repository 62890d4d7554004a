"""Claims of papers, figures that reproduce theirs, and the experiments behind them. This package
imports the others; none of them imports it: `conf/report.yaml` names it."""
