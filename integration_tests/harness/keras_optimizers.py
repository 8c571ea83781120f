"""Keras's optimizers and their options, read from Keras: a new one is found as well."""

import inspect

from keras import optimizers

# What is tried for an option that is not a switch; a switch is turned.
VALUES = {
    "momentum": 0.8,
    "weight_decay": 0.1,
    "adam_weight_decay": 0.1,
    "clipnorm": 0.01,
    "clipvalue": 0.01,
    "global_clipnorm": 0.01,
    "loss_scale_factor": 4.0,
    "gradient_accumulation_steps": 2,
    "l1_regularization_strength": 0.01,
    "l2_regularization_strength": 0.01,
    "l2_shrinkage_regularization_strength": 0.01,
    "warmup_steps": 3,
    "dynamic_growth_steps": 2,
    "exclude_layers": ["hidden"],
}
WITH = {"use_ema": {"ema_overwrite_frequency": 2}, "nesterov": {"momentum": 0.8}}
# Numbers that an update computes with in any case.
NUMBERS = {
    *("learning_rate", "beta", "beta_1", "beta_2", "adam_beta_1", "adam_beta_2"),
    *("rho", "epsilon", "epsilon_1", "epsilon_2", "beta_2_decay", "clip_threshold"),
    *("initial_accumulator_value", "learning_rate_power", "adam_lr_ratio", "rms_rate"),
    *("muon_a", "muon_b", "muon_c", "ns_steps", "initial_scale"),
    *("ema_momentum", "ema_overwrite_frequency"),
}
# What holds other optimizers takes these; the others take a rate.
AROUND = {
    "LossScaleOptimizer": lambda: optimizers.Adam(0.01),
    "MultiOptimizer": lambda: optimizers.OptimizerMap(
        optimizers.Adam(0.01), {"words.*": optimizers.SGD(0.1)}
    ),
}
# Keras 3.5, the oldest that is supported, does not have these.
NEWER = {"Muon", "MultiOptimizer"}
KINDS = {
    name: kind
    for name, kind in sorted(vars(optimizers).items())
    if inspect.isclass(kind) and issubclass(kind, optimizers.Optimizer)
    if kind is not optimizers.Optimizer
}


def present(*cases):
    """Lists the cases, or optimizers, that this version of Keras can have."""
    return [case for case in cases if case.split()[0] not in NEWER - KINDS.keys()]


def options_of(kind):
    """Maps the options of an optimizer to their defaults."""
    found = inspect.signature(kind).parameters.values()
    return {
        own.name: own.default
        for own in found
        if own.kind != own.VAR_KEYWORD and own.name != "name"
    }


def unknown_options():
    """Lists options that no case tries and that are not numbers."""
    known = {*VALUES, *NUMBERS, "inner_optimizer", "optimizer_map"}
    return [
        (name, option)
        for name, kind in KINDS.items()
        for option, default in options_of(kind).items()
        if option not in known and not isinstance(default, bool)
    ]


def _tried(kind):
    """Lists keyword arguments: none, and each option alone."""
    yield {}
    for name, default in options_of(kind).items():
        if name in VALUES or isinstance(default, bool):
            yield {name: VALUES.get(name, not default), **WITH.get(name, {})}


CASES = {
    " ".join([name, *list(options)[:1]]): (name, options)
    for name, kind in KINDS.items()
    for options in _tried(kind)
}


def make(case):
    """Makes the optimizer of a case."""
    name, options = CASES[case]
    first = AROUND.get(name, lambda: 0.01)()
    return KINDS[name](first, **options)
