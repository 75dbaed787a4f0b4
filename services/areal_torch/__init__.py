"""The torch half of the library: what a trainer's ranks run.

    engines     what a recipe calls: actor, critic, SFT, rollout; the model and its parallel plan
    training    the life of one trainer process around its engine
    algorithms  pure functions of tensors
    models      small models, and products that are fast on this CPU
    publish     how a rank gives away the bytes of a policy version

It imports `areal`. Of what `areal` gives recipes, the names that need torch are defined here, and
`areal` imports them on first use only, so that workers without torch can load the recipe too.
"""
