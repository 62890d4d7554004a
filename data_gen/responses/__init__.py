"""Where responses come from: one module per source, one YAML per source under ``conf/responses``.

Responses from elsewhere are taken to be samples of the target under the harvest's warp, given the
prompt as this program renders it (`data_gen.prompts.render`). They are text or token ids. Ids are
exact. Text is tokenised again, by itself: the tokens need not be those that were sampled. Labels
and distributions are always those of the tokens recorded."""
