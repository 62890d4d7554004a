"""What each paper claims, the figures that reproduce its own, and the experiments behind them. It
imports the packages; none of them imports it: `conf/report.yaml` names it."""
