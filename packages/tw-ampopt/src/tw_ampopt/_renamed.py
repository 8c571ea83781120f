"""Old public names and arguments that still work in this version, with a warning."""

NAMES = {
    "DoublingScale": "tw_ampopt.DynamicLossScale",
    "GradualScale": "tw_ampopt.GradualLossScale",
    "NoScale": "tw_ampopt.NoOpLossScale",
    "ScaleRule": "tw_ampopt.LossScale",
    "StaticScale": "tw_ampopt.StaticLossScale",
}
# ``Optimizer`` keeps the older name, which is StyleGAN2's.
TOWER_OPTIMIZER_ARGUMENTS = {"minibatch_multiplier": "accumulation_steps"}
