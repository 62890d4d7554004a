"""Responses to the prompts of a harvest: generated here by the target, or external.

External responses are read from a file or asked of a server: one module and one YAML under
``conf/responses`` for each. They are taken to be samples of the target under the harvest's warp,
given the prompt as this program renders it (`data_gen.prompts.render`). They are text or token ids.
Ids are exact. Text is tokenised again, by itself: the tokens need not be those that were sampled.
Labels and distributions are always those of the tokens recorded."""
