from dataclasses import dataclass
@dataclass
class S:
    cases: int
SUITES={"kuberay-samples":S(71)}
ROWS_OF_LLAMA_FACTORY={"alpaca_en_demo":999,"alpaca_zh_demo":1000,"identity":91,"glaive_toolcall_en_demo":300,"glaive_toolcall_zh_demo":300,"dpo_en_demo":300,"dpo_zh_demo":300,"kto_en_demo":300}
