"""Model types of transformers 5.24.0 that mention rotary positions, and that ropewalk neither reads nor refuses.

`class_defaults` uses this list to find model types that are new in a later version. The listed models were not examined
one by one. Remove a name here when ropewalk supports it.
"""

# Their modeling file mentions rotary positions, but the recorded layer rotates nothing.
WITHOUT_ROPE = """
    blenderbot-small bridgetower_text_model canary_decoder clvp_decoder deimv2 dpr emu3_vqgan
    granite_docling_vision groupvit_text_model groupvit_vision_model idefics2_vision idefics3_vision internvl_vision
    janus_vision_model kosmos_2_5_text_model kosmos_2_5_vision_model kosmos_2_text_model kosmos_2_vision_model
    mllama_vision_model ovis2_vision smolvlm_vision
    molmo2_vision moonshine_streaming_encoder perceiver phi4_multimodal_audio phi4_multimodal_vision
    pix2struct_text_model pix2struct_vision_model pp_doclayout_v2 qianfan_ocr_vision qwen2_audio_encoder radio
    reformer sew-d siglip2_text_model siglip_text_model siglip_vision_model unlimited_ocr_vision_encoder vits
"""
# Encoders of images and sound, parts that need other inputs, and models that contain a text model with its own type.
OTHERS = """
    EvollaModel apertus1p5_vision_tokenizer autoformer bark bridgetower_vision_model canary chameleon_vqgan
    cosmos3_edge_vision deepseek_ocr2_sam_vision_model
    edgetam_video_mask_decoder edgetam_video_prompt_encoder
    funnel gemma3n_audio gemma3n_vision gemma4_audio
    gemma4_unified_audio gemma4_unified_vision glm_image_vision
    glm_image_vqmodel got_ocr2_vision hunyuan_vl_vision hy_v4_vl_vision idefics2_perceiver
    idefics_perciever idefics_vision informer
    inkling_audio inkling_vision janus_vqgan kosmos-2 kosmos-2.5
    minicpmv4_7_vision molmo2_adapter
    muse_spark_audio
    nemotron_asr_streaming nemotron_asr_streaming_encoder parakeet_ctc
    parakeet_encoder parakeet_rnnt parakeet_tdt pix2struct
    qwen2_5_omni_audio_encoder qwen2_5_omni_bigvgan
    qwen3_omni_moe_audio_encoder
    rag
    sam2_video_mask_decoder sam2_video_prompt_encoder sam3_detr_decoder sam3_detr_encoder sam3_geometry_encoder
    sam3_mask_decoder sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder
    sapiens2_head siglip2
    time_series_transformer timm_wrapper unlimited_ocr_sam_vision_model unlimited_ocr_vision

"""
LEFT_OUT = frozenset((WITHOUT_ROPE + OTHERS).split())
