"""Preflight: whether a run can work, judged before anything is started.

    findings    what a check says: level, what was found, the rule, what to change
    cluster     what machines there are: this one, or a shape given in words
    model       the policy's shape and size, from its folder
    memory      what learner ranks, engines and hosts need, in parts
    versions, pace, placement, fit      checks that only compute
    reading     tokenizer, chat template, data and reward, in child processes

Every check is a plain function of the config and of facts that somebody else has gathered, so that
a config can be judged against machines that aren't here. No GPU, no torch, no cluster is needed.
`dapo_async.doctor` gathers the facts and puts the checks in order.
"""
