// The noise of sampling, as kernels/noise.py defines it, and the order of scores: single rounded float32
// operations throughout, so that host and device agree to the last bit.
#pragma once

__device__ __forceinline__ unsigned ordered_bits(float x) {
    if (x != x) return 0;
    if (x == 0.0f) x = 0.0f;  // -0 equals 0
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The natural logarithm of normal positive floats, as _log.
__device__ __forceinline__ float log_unfused(float a) {
    const int offset = __float_as_int(a) - 0x3F333333;
    const float n = (float)(offset >> 23);
    const float m = __int_as_float((offset & 0x7FFFFF) + 0x3F333333);
    const float f = __fsub_rn(m, 1.0f);
    const float s = __fdiv_rn(f, __fadd_rn(f, 2.0f));
    const float z = __fmul_rn(s, s);
    float p = 1.0f / 9.0f;
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 7.0f);
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 5.0f);
    p = __fadd_rn(__fmul_rn(p, z), 1.0f / 3.0f);
    const float twice = __fadd_rn(s, s);
    const float small =
        __fsub_rn(__fmul_rn(__fmul_rn(twice, z), p), __fmul_rn(n, 2.12194440e-4f));
    return __fadd_rn(__fmul_rn(n, 0.693359375f), __fadd_rn(twice, small));
}

__device__ __forceinline__ float gumbel(unsigned bits) {
    const float most = 1.0f - 1.0f / 16777216.0f;
    float w = __fmul_rn(__fadd_rn(__uint2float_rn(bits), 0.5f), 1.0f / 4294967296.0f);
    w = fminf(w, most);
    const float rest = __fsub_rn(1.0f, w);
    float e = w;
    if (rest != 1.0f) {
        const float lost = __fsub_rn(1.0f, rest);
        e = __fmul_rn(-log_unfused(rest), __fdiv_rn(w, lost));
    }
    return -log_unfused(e);
}

// Philox4x32 with ten rounds.
__device__ __forceinline__ uint4 philox(uint4 c, unsigned k0, unsigned k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned a_high = __umulhi(0xD2511F53u, c.x), a_low = 0xD2511F53u * c.x;
        const unsigned b_high = __umulhi(0xCD9E8D57u, c.z), b_low = 0xCD9E8D57u * c.z;
        c = make_uint4(b_high ^ c.y ^ k0, b_low, a_high ^ c.w ^ k1, a_low);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}
