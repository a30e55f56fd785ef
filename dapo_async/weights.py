"""WeightStore: how a learner's versions reach the engines of one machine, without pickle."""
