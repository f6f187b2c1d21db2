// Numbers as torch has them: read from and written to float32, whatever their dtype.

#pragma once

#include <cstdint>
#include <cstring>

enum Dtype : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

// The last axis is dense, the others have strides in elements.
struct Array {
    int64_t data, dtype, batch, head, token;

    int64_t at(int64_t row, int64_t of_head, int64_t of_token) const {
        return row * batch + of_head * head + of_token * token;
    }
};

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(address);
}

#if defined(LINATTN_NO_HALF)  // for tests
#elif defined(__ARM_FP16_FORMAT_IEEE)
#define LINATTN_HALF __fp16
#elif defined(__FLT16_MAX__) && (!defined(__clang__) || __clang_major__ >= 14)
#define LINATTN_HALF _Float16
#endif

template <class To, class From>
To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits of another size");
    To found;
    memcpy(&found, &x, sizeof(To));
    return found;
}

#ifdef LINATTN_HALF
inline float from_half(uint16_t x) { return static_cast<float>(same_bits<LINATTN_HALF>(x)); }

inline uint16_t to_half(float x) { return same_bits<uint16_t>(static_cast<LINATTN_HALF>(x)); }
#else  // compilers without the type, such as GCC 11 on x86
inline float from_half(uint16_t x) {
    const uint32_t magnitude = x & 0x7fff, sign = static_cast<uint32_t>(x & 0x8000) << 16;
    const float found = magnitude < 0x7c00 ? same_bits<float>(magnitude << 13) * 0x1p112f
                                           : same_bits<float>(0x7f800000 | magnitude << 13);
    return same_bits<float>(same_bits<uint32_t>(found) | sign);
}

inline uint16_t to_half(float x) {  // to the nearest, ties to even
    const uint32_t bits = same_bits<uint32_t>(x), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    uint32_t found;
    if (magnitude > 0x7f800000)
        found = 0x7e00;
    else if (magnitude >= 0x47800000)
        found = 0x7c00;
    else if (magnitude < 0x38800000)  // below the least normal number: the sum of floats rounds
        found = same_bits<uint32_t>(same_bits<float>(magnitude) + 0.5f) - same_bits<uint32_t>(0.5f);
    else
        found = (magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13;
    return static_cast<uint16_t>(found | sign);
}
#endif

inline float from_brain(uint16_t x) { return same_bits<float>(static_cast<uint32_t>(x) << 16); }

inline uint16_t to_brain(float x) {  // to the nearest, ties to even; NaN stays NaN
    const uint32_t bits = same_bits<uint32_t>(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int AHEAD = 8;  // tokens; heads lie between them in memory, so processors do not guess what comes

// `count` numbers to float32.
inline void read(const Array& x, int64_t from, int count, float* to) {
    if (x.dtype == FLOAT32) {
        const float* source = at<float>(x.data) + from;
        const char* ahead = reinterpret_cast<const char*>(source + AHEAD * x.token);
        for (int i = 0; i < count * 4; i += 64) __builtin_prefetch(ahead + i);
        for (int i = 0; i < count; ++i) to[i] = source[i];
        return;
    }
    const uint16_t* source = at<uint16_t>(x.data) + from;
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) to[i] = from_brain(source[i]);
    else
        for (int i = 0; i < count; ++i) to[i] = from_half(source[i]);
}

inline void write(const Array& x, int64_t to, int count, const float* from) {
    if (x.dtype == FLOAT32) {
        float* target = at<float>(x.data) + to;
        for (int i = 0; i < count; ++i) target[i] = from[i];
        return;
    }
    uint16_t* target = at<uint16_t>(x.data) + to;
    if (x.dtype == BFLOAT16)
        for (int i = 0; i < count; ++i) target[i] = to_brain(from[i]);
    else
        for (int i = 0; i < count; ++i) target[i] = to_half(from[i]);
}
